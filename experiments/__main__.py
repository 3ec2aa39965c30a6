"""`python -m experiments NAME`: a published experiment beside what comes out here."""

from experiments.command import app

if __name__ == "__main__":
    app(prog_name="python -m experiments")
