"""Speaks as kvlite/bench/peer_program.py does, and loads nothing."""

import json
import sys

opened = json.loads(sys.stdin.readline())
assert opened.keys() == {"peers", "model", "dtype", "device", "threads"}
unknown = [peer for peer in opened["peers"] if peer == "kvpress:nosuch"]
print(json.dumps({"unknown": unknown[0], "presses": ["knorm"]} if unknown else {}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["peer"] == "kvpress:dies":
        sys.exit(1)
    answer = {
        "ids": asked["forced"],
        "kv_bytes": 10 * (asked["keep"] + len(asked["question"])),
        "entries_mean": asked["keep"] + len(asked["question"]),
        "surprise": len(asked["context"]),
        "reading_s": 2.0,
        "token_ms": 30.0,
    }
    if asked["peer"] == "kvpress:fails":
        answer = {"error": "ValueError: too short"}
    print(json.dumps(answer), flush=True)
