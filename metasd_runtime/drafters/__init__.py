"""The drafters: each a plug-in of the round."""
