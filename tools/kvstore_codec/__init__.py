"""The `kvstore-codec` command."""
