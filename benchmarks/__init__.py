"""Measuring: the load client behind ``crossdock bench``, and comparisons that are scripts of their own."""
