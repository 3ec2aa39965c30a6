"""Laws over weights that maximise a bound on the evidence."""
