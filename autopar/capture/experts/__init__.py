"""Mixtures of experts whose code selects rows by values, traced as operators."""
