"""Planted bugs in llmc/text."""

from mutant import Mutant, unit

ROOM = "llmc/text"

ROWS = [
    Mutant("a matcher that looks no further than its block", "find_matches", "std::min(text.size(), end + longest_ - 1)", "end",
           unit("AddedTokens.*")),
    Mutant("special tokens in user text", "AddedTokenMatcher::split", "if (token->special && !allow_special)",
           "if (token->special && !allow_special && token->lstrip)", unit("Tokenizer.*")),
    Mutant("BPE merges a pair at another pair's rank", "merge", "&& merge->rank == candidate >> 32", "",
           unit("*TokenizerVectors.EncodesEveryString*")),
    Mutant("equal marks may change places", "order_marks", "std::stable_sort", "std::sort",
           unit("Tokenizer/TokenizerVectors.EncodesEveryCodePoint*")),
    Mutant("a match joins the piece behind it, whatever it is", "joins", "&& !next_is_match", "",
           unit("PreTokenizer.AMatchIsAPiece*")),
    Mutant("steps of matching are not counted", "match_at", "if (enough) scratch.steps_left_ -= steps;", "",
           unit("PreTokenizer.ATextThatTakes*")),
    Mutant("what a match reads in a larger window is not counted", "match_at", "(end - begin) / kBytesPerStep", "0",
           unit("PreTokenizer.ATextThatTakes*")),
    Mutant("a window may end within a match", "match_at", "? PCRE2_PARTIAL_HARD : 0", "? 0 : 0", unit("PreTokenizer.Windows*")),
    Mutant("a match of nothing is none", "each_span", "(*end == position && last_end == position)", "*end == position",
           unit("PreTokenizer.AMatchIsAPiece*")),
    Mutant("what may be empty repeats", "repeated", "(part.may_be_empty", "(false", unit("SplitPattern.WhatMeans*")),
    Mutant("ss ignores case as two letters", "literal", '"fl", "ss", "st"', '"fl", "st"', unit("SplitPattern.WhatMeans*")),
    Mutant("the largest pattern is refused", "translate", "cost > kMaxPatternCost", "cost >= kMaxPatternCost",
           unit("SplitPattern.TheLargest*")),
    Mutant("normalizing makes no text shorter", "most_shrinking", "step.form == NormalForm::nfkc ? 6 : 4", "1",
           unit("*NoTextHasFewerIds*", "Tokenizer.TheLeastIds*")),
    Mutant("BOS forgotten", "Tokenizer::encode", "if (add_bos && bos_)", "if (add_bos && bos_ && text.empty())",
           unit("Tokenizer.*", "*TokenizerVectors.EncodesEveryString*")),
    Mutant("a token behind a broken character begins with it", "StreamingDecoder::push", "held_bytes > 0", "held_bytes > 64",
           unit("StreamingDecoder.TokensBegin*")),
    Mutant("added tokens not normalized", "matcher_of", "if (normalized)", "if (false)",
           unit("Tokenizer/TokenizerVectors.EncodesEveryString*")),
    Mutant("of a repeated merge the first place counts", "read_merges",
           "spec_.merges[std::exchange(place->second, spec_.merges.size())].left = kRepeated", "continue",
           unit("TokenizerFile.ARepeatedMerge*")),
    Mutant("the longest token is refused", "add_token", "size() > kMaxTokenBytes", "size() >= kMaxTokenBytes",
           unit("TokenizerFile.TheLimits*")),
]
