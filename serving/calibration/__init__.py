"""What a machine was measured to do: step times fitted to points, and the profile that keeps them."""
