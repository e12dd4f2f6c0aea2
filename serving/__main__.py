"""`python -m serving` is `tandem`."""

from serving.cli import main

if __name__ == "__main__":
    main()
