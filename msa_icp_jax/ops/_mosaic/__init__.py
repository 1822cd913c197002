"""What the Mosaic GPU kernels share: the launch, and the pieces that more than one kernel uses."""
