"""What attention is: workloads, masks, reference and declarations. No tile is chosen here and no target is known."""
