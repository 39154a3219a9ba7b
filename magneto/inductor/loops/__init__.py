"""The loops IR: grammar (`ir`), text (`show`). Its meaning, the reader of its text and its checks are the tests' (tests/inductor/loops)."""
