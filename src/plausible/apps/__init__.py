"""What people meet: the command line, scikit-learn estimators, reports, plots, data sets, comparisons and sweeps."""
