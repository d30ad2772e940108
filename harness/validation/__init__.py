"""``kv-harness validate``: a checkpoint under the programs of a server that bounds its KV cache, with a verdict."""
