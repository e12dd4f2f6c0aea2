"""The lab's config as other systems want it."""
