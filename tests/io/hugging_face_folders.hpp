// SPDX-License-Identifier: Apache-2.0
#pragma once

// Written by hugging_face_folders.py with PyTorch 2.15.0. Do not edit.

#include <map>
#include <string>

namespace pytorch_values {

/// The bytes of each file, by folder and name.
inline const std::map<std::string, std::map<std::string, std::string>> hugging_face_folders = {
    {"base",
     {
    {"model-00001-of-00003.safetensors",
     std::string("\330\003\000\000\000\000\000\000{\"__metadata__\":{\"format\":\"pt\"},\"h.0.input_layernorm.bias\":{\""
     "dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]},\"h.0.input_layernorm.weight\":{\"dtype\":\"F16"
     "\",\"shape\":[4],\"data_offsets\":[8,16]},\"h.0.post_attention_layernorm.bias\":{\"dtype\":\"F16\",\""
     "shape\":[4],\"data_offsets\":[16,24]},\"h.0.post_attention_layernorm.weight\":{\"dtype\":\"F16\",\"sh"
     "ape\":[4],\"data_offsets\":[24,32]},\"h.0.self_attention.dense.bias\":{\"dtype\":\"F16\",\"shape\":[4"
     "],\"data_offsets\":[32,40]},\"h.0.self_attention.dense.weight\":{\"dtype\":\"F16\",\"shape\":[4,4],\""
     "data_offsets\":[40,72]},\"h.0.self_attention.query_key_value.bias\":{\"dtype\":\"F16\",\"shape\":[12]"
     ",\"data_offsets\":[72,96]},\"h.0.self_attention.query_key_value.weight\":{\"dtype\":\"F16\",\"shape\""
     ":[12,4],\"data_offsets\":[96,192]},\"word_embeddings.weight\":{\"dtype\":\"F16\",\"shape\":[8,4],\"da"
     "ta_offsets\":[192,256]},\"word_embeddings_layernorm.bias\":{\"dtype\":\"F16\",\"shape\":[4],\"data_of"
     "fsets\":[256,264]},\"word_embeddings_layernorm.weight\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offse"
     "ts\":[264,272]}}    \000\000\000$\000(\000*\000,\000-\000.\000/\0007@7\2007\3007\0008 8@8`8\2008\2408"
     "\3008\3408\0009 9@9`9\2009\2409\3009\3409\000: :@:`:\200:\240:\300:\340:\000; ;@;`;\200;\240;\300;\340"
     ";\000<\020< <0<@<P<`<p<\200<\220<\240<\260<\300<\320<\340<\360<\000=\020= =0=@=P=`=p=\200=\220=\240=\260"
     "=\300=\320=\340=\360=\000>\020> >0>@>P>`>p>\200>\220>\240>\260>\300>\320>\340>\360>\000?\020? ?0?\300"
     "?\320?\340?\360?\000\000\000$\000(\000*\000,\000-\000.\000/\0000\2000\0001\2001\0002\2002\0003\2003\000"
     "4@4\2004\3004\0005@5\2005\3005\0006@6\2006\3006\0007@7\2007\3007\0008 8@8`8", 1264)},
    {"model-00002-of-00003.safetensors",
     std::string("p\001\000\000\000\000\000\000{\"__metadata__\":{\"format\":\"pt\"},\"h.0.mlp.dense_4h_to_h.bias\":{\""
     "dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]},\"h.0.mlp.dense_4h_to_h.weight\":{\"dtype\":\"F"
     "16\",\"shape\":[4,16],\"data_offsets\":[8,136]},\"h.0.mlp.dense_h_to_4h.bias\":{\"dtype\":\"F16\",\"s"
     "hape\":[16],\"data_offsets\":[136,168]},\"h.0.mlp.dense_h_to_4h.weight\":{\"dtype\":\"F16\",\"shape\""
     ":[16,4],\"data_offsets\":[168,296]}}   \0000\2000\0001\2001\0002\2002\0003\2003\0004@4\2004\3004\0005"
     "@5\2005\3005\0006@6\2006\3006\0007@7\2007\3007\0008 8@8`8\2008\2408\3008\3408\0009 9@9`9\2009\2409\300"
     "9\3409\000: :@:`:\200:\240:\300:\340:\000; ;@;`;\200;\240;\300;\340;\000<\020< <0<@<P<`<p<\200<\220<\240"
     "<\260<\300<\320<\340<\360<\000=\020= =0=@=P=`=p=\200=\220=\240=\260=\300=\320=\340=\360=\000>\020> >0"
     ">@>P>`>p>\200>\220>\240>\260>\300>\320>\340>\360>\000?\020? ?0?@?P?`?p?\200?\220?\240?\260?\300?\320?"
     "\340?\360?\000\000\000$\000(\000*\000,\000-\000.\000/\0000\2000\0001\2001\0002\2002\0003\2003\0004@4\200"
     "4\3004\0005@5\2005\3005\0006@6\2006\3006", 672)},
    {"model-00003-of-00003.safetensors",
     std::string("\240\000\000\000\000\000\000\000{\"__metadata__\":{\"format\":\"pt\"},\"ln_f.bias\":{\"dtype\":\"F16\""
     ",\"shape\":[4],\"data_offsets\":[0,8]},\"ln_f.weight\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offset"
     "s\":[8,16]}}   @?P?`?p?\200?\220?\240?\260?", 184)},
    {"model.safetensors.index.json",
     std::string("{\012  \"metadata\": {\012    \"total_parameters\": 292,\012    \"total_size\": 584\012  },\012  \"we"
     "ight_map\": {\012    \"h.0.input_layernorm.bias\": \"model-00001-of-00003.safetensors\",\012    \"h.0"
     ".input_layernorm.weight\": \"model-00001-of-00003.safetensors\",\012    \"h.0.mlp.dense_4h_to_h.bias\""
     ": \"model-00002-of-00003.safetensors\",\012    \"h.0.mlp.dense_4h_to_h.weight\": \"model-00002-of-000"
     "03.safetensors\",\012    \"h.0.mlp.dense_h_to_4h.bias\": \"model-00002-of-00003.safetensors\",\012   "
     " \"h.0.mlp.dense_h_to_4h.weight\": \"model-00002-of-00003.safetensors\",\012    \"h.0.post_attention_"
     "layernorm.bias\": \"model-00001-of-00003.safetensors\",\012    \"h.0.post_attention_layernorm.weight\""
     ": \"model-00001-of-00003.safetensors\",\012    \"h.0.self_attention.dense.bias\": \"model-00001-of-00"
     "003.safetensors\",\012    \"h.0.self_attention.dense.weight\": \"model-00001-of-00003.safetensors\",\012"
     "    \"h.0.self_attention.query_key_value.bias\": \"model-00001-of-00003.safetensors\",\012    \"h.0.s"
     "elf_attention.query_key_value.weight\": \"model-00001-of-00003.safetensors\",\012    \"ln_f.bias\": \""
     "model-00003-of-00003.safetensors\",\012    \"ln_f.weight\": \"model-00003-of-00003.safetensors\",\012"
     "    \"word_embeddings.weight\": \"model-00001-of-00003.safetensors\",\012    \"word_embeddings_layern"
     "orm.bias\": \"model-00001-of-00003.safetensors\",\012    \"word_embeddings_layernorm.weight\": \"mode"
     "l-00001-of-00003.safetensors\"\012  }\012}\012", 1315)},
    }},
    {"classifier",
     {
    {"model.safetensors",
     std::string("\330\006\000\000\000\000\000\000{\"__metadata__\":{\"format\":\"pt\"},\"score.weight\":{\"dtype\":\"B"
     "F16\",\"shape\":[2,4],\"data_offsets\":[0,16]},\"transformer.h.0.input_layernorm.bias\":{\"dtype\":\""
     "BF16\",\"shape\":[4],\"data_offsets\":[16,24]},\"transformer.h.0.input_layernorm.weight\":{\"dtype\":"
     "\"BF16\",\"shape\":[4],\"data_offsets\":[24,32]},\"transformer.h.0.mlp.dense_4h_to_h.bias\":{\"dtype\""
     ":\"BF16\",\"shape\":[4],\"data_offsets\":[32,40]},\"transformer.h.0.mlp.dense_4h_to_h.weight\":{\"dty"
     "pe\":\"BF16\",\"shape\":[4,16],\"data_offsets\":[40,168]},\"transformer.h.0.mlp.dense_h_to_4h.bias\":"
     "{\"dtype\":\"BF16\",\"shape\":[16],\"data_offsets\":[168,200]},\"transformer.h.0.mlp.dense_h_to_4h.we"
     "ight\":{\"dtype\":\"BF16\",\"shape\":[16,4],\"data_offsets\":[200,328]},\"transformer.h.0.post_attent"
     "ion_layernorm.bias\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[328,336]},\"transformer.h.0."
     "post_attention_layernorm.weight\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[336,344]},\"tra"
     "nsformer.h.0.self_attention.dense.bias\":{\"dtype\":\"BF16\",\"shape\":[4],\"data_offsets\":[344,352]"
     "},\"transformer.h.0.self_attention.dense.weight\":{\"dtype\":\"BF16\",\"shape\":[4,4],\"data_offsets\""
     ":[352,384]},\"transformer.h.0.self_attention.query_key_value.bias\":{\"dtype\":\"BF16\",\"shape\":[12"
     "],\"data_offsets\":[384,408]},\"transformer.h.0.self_attention.query_key_value.weight\":{\"dtype\":\""
     "BF16\",\"shape\":[12,4],\"data_offsets\":[408,504]},\"transformer.ln_f.bias\":{\"dtype\":\"BF16\",\"s"
     "hape\":[4],\"data_offsets\":[504,512]},\"transformer.ln_f.weight\":{\"dtype\":\"BF16\",\"shape\":[4],"
     "\"data_offsets\":[512,520]},\"transformer.word_embeddings.weight\":{\"dtype\":\"BF16\",\"shape\":[8,4"
     "],\"data_offsets\":[520,584]},\"transformer.word_embeddings_layernorm.bias\":{\"dtype\":\"BF16\",\"sh"
     "ape\":[4],\"data_offsets\":[584,592]},\"transformer.word_embeddings_layernorm.weight\":{\"dtype\":\"B"
     "F16\",\"shape\":[4],\"data_offsets\":[592,600]}} \000\000\200<\000=@=\200=\240=\300=\340=\000>\020> >"
     "0>@>P>`>p>\200>\210>\220>\230>\240>\250>\260>\270>\300>\310>\320>\330>\340>\350>\360>\370>\000?\004?\010"
     "?\014?\020?\024?\030?\034? ?$?(?,?0?4?8?<?@?D?H?L?P?T?X?\\?`?d?h?l?p?t?x?|?\200?\202?\204?\206?\210?\212"
     "?\214?\216?\220?\222?\224?\226?\230?\232?\234?\236?\240?\242?\244?\246?\250?\252?\254?\256?\260?\262?"
     "\264?\266?\270?\272?\274?\276?\300?\302?\304?\306?\310?\312?\314?\316?\320?\322?\324?\326?\330?\332?\334"
     "?\336?\340?\342?\344?\346?\350?\352?\354?\356?\360?\362?\364?\366?\370?\372?\374?\376?\000\000\200<\000"
     "=@=\200=\240=\300=\340=\000>\020> >0>@>P>`>p>\200>\210>\220>\230>\240>\250>\260>\270>\300>\310>\320>\330"
     ">\340>\350>\360>\370>\000?\004?\010?\014?\020?\024?\030?\034? ?$?(?,?0?4?8?<?@?D?H?L?P?T?X?\\?`?d?h?l"
     "?p?t?x?|?\200?\202?\204?\206?\210?\212?\214?\216?\220?\222?\224?\226?\230?\232?\234?\236?\240?\242?\244"
     "?\246?\250?\252?\254?\256?\260?\262?\264?\266?\270?\272?\274?\276?\300?\302?\304?\306?\310?\312?\314?"
     "\316?\320?\322?\324?\326?\330?\332?\334?\336?\340?\342?\344?\346?\350?\352?\354?\356?\360?\362?\364?\366"
     "?\370?\372?\374?\376?\000\000\200<\000=@=\200=\240=\300=\340=\000>\020> >0>@>P>`>p>\200>\210>\220>\230"
     ">\240>\250>\260>\270>\300>\310>\320>\330>\340>\350>\360>\370>\000?\004?\010?\014?\020?\024?\030?\034?"
     " ?$?(?,?", 2360)},
    }},
};

}  // namespace pytorch_values
