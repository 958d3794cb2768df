"""Device placement of general graphs: which device runs which task, without a pipeline."""
