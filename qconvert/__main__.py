"""`qconvert` and `python -m qconvert`."""

from qconvert.cli.main import main

if __name__ == "__main__":
    main()
