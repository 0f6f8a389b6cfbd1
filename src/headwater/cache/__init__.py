"""The prefix cache: whose KV a block holds, which blocks hold what, and what to reuse or evict. Pure Python."""
