"""`python -m shardio` is the command `shardio`."""

from shardio.cli.main import main

if __name__ == "__main__":
    main()
