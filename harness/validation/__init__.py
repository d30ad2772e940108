"""``kv-harness validate``: one checkpoint under the programs of a server with a bounded KV cache, and what that proves."""
