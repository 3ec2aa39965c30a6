"""What a fit returns: stored draws, laws, linearised networks, mixtures; the predictive; saving and loading."""
