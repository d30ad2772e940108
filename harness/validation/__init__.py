"""``kv-harness validate``: a checkpoint under the programs of a server that bounds its KV cache, and what that proves."""
