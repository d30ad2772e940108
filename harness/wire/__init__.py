"""The wire: engines in other processes. PROTOCOL.md says what a worker speaks."""
