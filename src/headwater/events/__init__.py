"""The stream of KV events, seen from outside: its bytes, and a reader that keeps up with it. Needs no engine."""
