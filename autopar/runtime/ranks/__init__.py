"""This process among its peers: process groups, flight recorder, failure handling."""
