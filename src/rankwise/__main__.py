"""`python -m rankwise` is the command line."""

from rankwise.cli.app import main

if __name__ == "__main__":
    main()
