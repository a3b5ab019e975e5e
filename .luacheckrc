std = "lua51"
read_globals = {
  "KEYS", "ARGV", "redis", "cmsgpack", "struct", "cjson",
  "call", "reply", "queue", "bloom",
}
globals = {"given", "visits"}
max_line_length = 100
