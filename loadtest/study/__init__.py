"""`make study-adaptive`: decoding that adapts beside decoding that does not, under a load that rises and falls."""
