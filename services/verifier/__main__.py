"""`python -m services.verifier`. Nothing is imported at the top: spawned workers may import this module."""

if __name__ == "__main__":
    from services.verifier.server import main

    main()
