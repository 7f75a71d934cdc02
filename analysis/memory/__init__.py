"""Who holds memory?  Of a step that ran or of fake tensors, by the allocator's rules."""
