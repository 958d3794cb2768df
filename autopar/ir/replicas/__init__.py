"""Local updates as values: how independent replicas synchronise, and when."""
