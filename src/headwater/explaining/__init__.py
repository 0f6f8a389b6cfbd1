"""What breaks the common beginning of prompts: two compared, or a file of them looked through."""
