std = "lua51"
read_globals = {"KEYS", "ARGV", "redis", "cmsgpack", "struct", "queue", "cjson"}
globals = {"bloom", "visits"}
max_line_length = 100
