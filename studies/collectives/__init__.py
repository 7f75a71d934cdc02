"""How long do collectives take, by bytes and ranks?"""
