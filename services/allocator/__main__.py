"""`python -m services.allocator`."""

from services.allocator.server import main

if __name__ == "__main__":
    main()
