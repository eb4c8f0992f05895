"""The demo: one model, the same requests with the policy on and with it only observing."""
