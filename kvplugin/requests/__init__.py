"""What belongs to one request: its arm in a rollout, its session, the fingerprint of its prompt.

Nothing is exported here: front ends import the parts they need, and none of these needs torch but :mod:`fits`.
"""
