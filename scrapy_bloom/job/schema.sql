-- The file of a job. docs/architecture.md describes it.
--
-- job: one row.
--     opened_as: the file while a process has it open: path, inode number and a random id; empty
--         after a clean close. in_use: whether that process has its queue elsewhere: in Scrapy's.
--     opened_before: what `opened_as` may still be in the file without its write-ahead log.
--     taken_over: a digest of the last queue of Scrapy's scheduler that was taken over.
--     run: the random id of the current run (NULL: none has begun), and run_name its name.
--     The others are in `rows.Figures`.
-- filter: one row, or none: what all generations of the filter share.
-- blocks: those that are not empty, 8 KiB each. They may lack fingerprints of `ops`.
-- ops: fingerprints, by the number of the batch that has recorded them.
-- requests: the columns are those of `store.Row`.
-- hops: pages to which rows were redirected, as the index `pages` has the rows' own pages.
-- done_pages: pages that are done, and in which epoch: the rows that have begun to wait for them in
--     that epoch are about to end.
-- runs: all runs, and the figures of the queue when each began: how many requests had entered it and
--     left it, how many had failed and were dead, and when the run before had ended (0: it had not).

CREATE TABLE job (
    opened_as TEXT, opened_before TEXT, in_use INTEGER, taken_over TEXT, spider TEXT, run BLOB,
    run_name TEXT, seq INTEGER, num_rows INTEGER, done INTEGER, position INTEGER, epoch INTEGER,
    adds_tries INTEGER, tried_at REAL, began REAL, ended_at REAL, alone INTEGER
);
CREATE TABLE filter (
    hash_scheme INTEGER, salt BLOB, fingerprinter TEXT, spider TEXT, error_rate REAL, sample TEXT
);
CREATE TABLE generations (
    number INTEGER PRIMARY KEY, num_blocks INTEGER, num_hashes INTEGER, capacity INTEGER,
    error_rate REAL, first_run REAL, last_run REAL, count INTEGER
);
CREATE TABLE blocks (
    generation INTEGER, number INTEGER, bits BLOB, PRIMARY KEY (generation, number)
) WITHOUT ROWID;
CREATE TABLE ops (
    seq INTEGER PRIMARY KEY, generation INTEGER, fingerprints BLOB
);

CREATE TABLE requests (
    id INTEGER PRIMARY KEY, state INTEGER NOT NULL, slot TEXT NOT NULL,
    priority INTEGER NOT NULL, rank INTEGER NOT NULL, position INTEGER NOT NULL,
    takes INTEGER NOT NULL, deaths INTEGER NOT NULL, tries INTEGER NOT NULL,
    epoch INTEGER NOT NULL, is_filtered INTEGER NOT NULL, is_start INTEGER NOT NULL,
    once INTEGER NOT NULL, reason TEXT NOT NULL, page BLOB, packed_hops BLOB NOT NULL,
    waits_for BLOB NOT NULL, first BLOB NOT NULL, data BLOB NOT NULL
);
CREATE TABLE hops (page BLOB, id INTEGER, PRIMARY KEY (page, id)) WITHOUT ROWID;
CREATE TABLE done_pages (page BLOB, epoch INTEGER, PRIMARY KEY (page, epoch)) WITHOUT ROWID;
CREATE TABLE runs (
    name TEXT PRIMARY KEY, began REAL, entered INTEGER, done INTEGER, failed INTEGER, dead INTEGER,
    ended_before REAL
);

-- With the state, so that queries about slots need not read the rows.
CREATE INDEX next ON requests (slot, priority DESC, rank, position, state) WHERE state < 1;
-- Nearly all rows are pending and were never taken, so these are small. SQLite uses them only for
-- queries that repeat their conditions. A request that is taken enters one of them.
CREATE INDEX pages ON requests (page, state) WHERE takes OR once;
CREATE INDEX rest ON requests (state) WHERE state > 1;
CREATE INDEX kept ON requests (is_start, id, epoch, state) WHERE state IN (3, 4);
CREATE INDEX waiting ON requests (waits_for, epoch) WHERE state = 3;

INSERT INTO job VALUES ('', '', 0, '', '', NULL, '', 0, 0, 0, 0, 0, 1, 0, 0, 0, 0);
