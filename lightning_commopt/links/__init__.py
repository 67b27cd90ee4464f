"""Links between ranks: what connects them, and which settings and logs say so."""
