"""`python -m services.value_prior`."""

from services.value_prior.server import main

if __name__ == "__main__":
    main()
