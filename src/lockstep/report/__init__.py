"""What a run did, why it was slow and why it stopped: one page of its folder. No torch."""
