"""From named gradients to their averages: buckets, one queue, a step as one transaction."""
