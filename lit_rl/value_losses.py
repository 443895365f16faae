"""From a critic's values to a loss per response token."""
