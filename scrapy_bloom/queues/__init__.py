"""The queue of CrashSafeScheduler: pending requests, in SQLite or in Redis."""
