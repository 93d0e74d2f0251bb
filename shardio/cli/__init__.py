"""The command `shardio`: one module for each subcommand, and what they share."""
