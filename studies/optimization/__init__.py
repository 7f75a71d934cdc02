"""What does each optimization gain, alone and on top of others?"""
