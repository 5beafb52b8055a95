"""Plans: what shall exist, proved to account for every source byte before any is read."""
