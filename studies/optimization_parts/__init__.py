"""How are sets of flags measured in turn in one process, and what do they say of each other?"""
