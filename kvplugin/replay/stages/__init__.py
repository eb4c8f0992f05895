"""A capture's records judged stage by stage: identity, cache, indexer, selection, attention, log-probabilities."""
