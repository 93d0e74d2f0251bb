"""The command `shardio`: one module for each group of subcommands, and shared options and output."""
