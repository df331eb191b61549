"""`python -m angelspec_jax` is the console command."""

from angelspec_jax.cli import main

if __name__ == "__main__":
    main()
