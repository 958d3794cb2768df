"""Operations that stand in for what torch.export cannot trace as it is written."""
