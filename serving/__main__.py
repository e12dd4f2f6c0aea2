"""`python -m serving` is `tandem`."""

from serving.cli.commands import main

if __name__ == "__main__":
    main()
