"""The KV cache in host RAM and on disk: storing, searching, fetching back."""
