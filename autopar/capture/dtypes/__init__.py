"""Dtypes of a trace: parameters in the computing dtype, autocast blocks, wide losses."""
